"""The HTTP endpoint of agents: it speaks OpenAI's protocol, and the policy answers."""
