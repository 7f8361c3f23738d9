"""The commands' flags, by what they are for. What a command does is imported when it is called."""
