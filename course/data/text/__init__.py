"""Text as tokens: corpora, tokenizers, token files, samples."""
