"""The site of the documents: what mkdocs does not do by itself."""
