"""Train engines: a model on a mesh that answers for packed rows and learns from them."""
