"""The router and its HTTP gateway, with workers that compute nothing."""
