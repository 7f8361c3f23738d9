"""How many workers a load needs: candidate clusters are simulated on measured costs of steps."""
