"""The number of the prepared form: manifest, graph and weights as this program writes and reads them. Any process.

Raise it whenever a model prepared before must not be served any more; cached ones are then prepared again.
"""

FORMAT = 1
