"""What chat models write beside text: thoughts and tool calls, in the syntax of each model family."""
