"""The CUDA C sources, as data of the package."""
