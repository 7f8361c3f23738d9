"""`baton bundle`: an archive for a bug report without secrets, prompts and answers."""
