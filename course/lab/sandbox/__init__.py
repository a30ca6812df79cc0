"""Run untrusted code in a separate process, isolated and limited."""
