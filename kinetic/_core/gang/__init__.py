"""The gang of a job as pure state machines: joins, signs of life, failures, attempts."""
