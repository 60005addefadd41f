"""Fewer bytes a weight: models rewritten in a smaller format, tensor by tensor."""
