# SPDX-License-Identifier: Apache-2.0
"""The engines behind the router: which there are, what each can take, how they are reached,
and how an operator changes them."""
