"""What is drawn on a terminal: tables, progress, Markdown, pictures."""
