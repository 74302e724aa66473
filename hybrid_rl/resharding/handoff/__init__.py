"""The handoff: sources of weights, the transports from trainer ranks to engines, and the proof of what arrived."""
