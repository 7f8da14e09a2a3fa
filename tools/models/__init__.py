"""Weights: fetching and converting the embedded model, and training, checking and converting draft heads."""
