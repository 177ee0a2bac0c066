"""Images out of recipes: Dockerfiles, and ``Image`` in Python.

``words``        quotes, escapes and variables of a Dockerfile (pure)
``lines``        its logical lines: continuations, comments, heredocs, directives (pure)
``instructions`` what each instruction is, as a value (pure)
``dockerfile``   all of these together: text -> stages (pure)
``plan``         which stages are needed, and in what order (pure)
``scope``        a stage on its way: variables, config, and what each instruction asks to be done (pure)
``ignore``       .dockerignore (pure)
``context``      the folder that COPY takes files from; ``tree``: the same of an image that is here
``placing``      where the files of a COPY go (pure)
``layertar``     files -> a layer: deterministic tar and gzip
``commit``       what a sandbox changed -> a layer
``cache``        what was built before, by content
``ground``       the layers that a stage has so far, and their files
``stage``        one stage, step by step: ``copying``, ``running`` (``mounts``, ``unpacking``, ``distrust``)
``executor``     stages as their needs allow
``image``        ``Image``; ``bootstrap``: a root filesystem out of a distribution's packages
"""
