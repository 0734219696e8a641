"""The checks of lanes, one module for each subject."""
