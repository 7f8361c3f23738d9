"""The forms of answers: their kinds, their limits, and the library that follows them token by token.

Knows neither router nor engine, which both use it. The library, llguidance, is imported only where a request asks.
"""
