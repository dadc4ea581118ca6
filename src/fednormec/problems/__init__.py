"""Problems to minimise: quadratics, logistic regression, neural networks with their models and layers. Each is M
functions on flat vectors and computes the gradients of many clients at once.
May use: core.
"""
