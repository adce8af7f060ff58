"""`kvkeep serve`, asked by OpenAI's own client."""
