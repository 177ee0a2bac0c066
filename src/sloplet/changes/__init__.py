"""What a sandbox has made of its files: told by the agent, compared with the image, brought to the host."""
