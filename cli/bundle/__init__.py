"""Archive for a bug report without secrets, prompts and answers (`baton bundle`)."""
