"""Keep a run alive: detect stalls, obey stop signals, allow one writer per folder."""
