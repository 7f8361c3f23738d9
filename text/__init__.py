"""What router and engine agree on: names of blocks, text of tokens, stop strings, structured output. No torch."""
