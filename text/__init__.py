"""Code that router and engine share: block names, sampling, detokeniser, stop strings, structured output. No torch."""
