"""Other weights for a model that is being served: what they must share with it, and steps over both."""
