"""A fault-tolerant parameter server on Ray.

The driver starts nodes, which hold blocks of the model, workers, which compute updates, and a controller, which drives
rounds, checkpoints and recovery. Any of their processes may be lost.
"""
