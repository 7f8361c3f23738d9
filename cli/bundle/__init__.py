"""`baton bundle`: one archive for a bug report, without secrets and without what clients sent or read."""
