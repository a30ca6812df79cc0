"""Text as tokens: corpora, tokenizers, token files and training samples."""
