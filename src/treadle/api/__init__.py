"""The library: models, sessions, generations, and what answers chats, embeddings and rankings."""
