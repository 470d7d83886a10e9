"""A parameter server: nodes that hold blocks, workers that compute updates of them, and failures that it survives."""
