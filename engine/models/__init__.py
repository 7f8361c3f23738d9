"""Models as plain tensors and functions over paged KV."""
