"""Weights of experts from one worker of the group to another."""
