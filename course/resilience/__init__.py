"""What keeps a run from being lost: stalls told, signals heeded, one writer a folder."""
