# SPDX-License-Identifier: Apache-2.0
"""Messages between engines, and the authenticated calls and servers that carry them."""
