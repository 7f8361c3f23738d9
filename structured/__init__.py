"""What an answer may be made to look like: the kinds, their limits, and the library that follows them token by token.

Knows neither router nor engine, which both use it. The library, llguidance, is imported only where a request asks.
"""
