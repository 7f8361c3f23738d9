"""The served model: its tokenizer and template, and the checks of a request against it."""
