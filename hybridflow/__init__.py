"""hybridflow: 3D-parallel reinforcement-learning post-training of language models.

This module owns the version and nothing else. It re-exports no name and imports nothing, so that
`import hybridflow` changes nothing and costs nothing; import deep names (`hybridflow.api`, `hybridflow.parallel.mesh`).
"""

__version__ = "0.1.0"
