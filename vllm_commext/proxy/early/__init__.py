"""The first token of a stream, sent when the prefill engine's answer is there.

rule      whether it may be sent, by the request and by the prefill engine's answer
form      how a decode engine writes its first events, learnt from its own
splice    a decode engine's stream without what has been sent before it
lead      one request's first events on their way to its client
"""
