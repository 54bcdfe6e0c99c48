"""Several processes train one model: who they are, what they exchange, how work and state are shared out."""
