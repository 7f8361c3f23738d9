"""Tokenizer of a checkpoint: one reader for server, offline engine, planner and batches.

`convert` lets transformers read the folder, and `checkpoint_tokenizer` keeps the result, so that processes without
transformers and torch get the same ids, prompts and end tokens.
"""
