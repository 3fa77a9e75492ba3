"""Measurements of the kernels and of the published ones beside them; results/ holds what was measured."""
