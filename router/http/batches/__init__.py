"""OpenAI's files and batches: a folder of files and unfinished batches, and the runner that answers their lines."""
