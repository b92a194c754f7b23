"""The training loops: roles on their meshes, the dataflow of a step, and the run around it."""
