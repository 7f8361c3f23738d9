"""How one worker is chosen among those that could serve a request. One policy per file; all of them pure functions."""
