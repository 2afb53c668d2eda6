"""Terminal output: tables, progress, Markdown, charts."""
