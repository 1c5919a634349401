"""Models as plain ``nn.Module``s: what to build, how to start it, what its loss is.

Nothing in here knows of a mesh, a rank or the environment. Parameters may have become DTensors by the time
they are filled; then a rank fills the part it holds (``slices``) and asks nobody for the rest."""
