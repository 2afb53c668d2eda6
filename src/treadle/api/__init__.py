"""The library API: models, sessions, generations, chats, embeddings and reranking."""
