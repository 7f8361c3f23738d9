"""How one worker is chosen among the candidates for a request. One policy per file; all of them pure functions."""
