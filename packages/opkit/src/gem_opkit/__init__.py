"""gem-opkit: what every GEM operator needs; this file holds the version and nothing else."""

__version__ = "0.1.0"
