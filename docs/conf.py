"""How Sphinx builds the site: ``make docs``. Nothing in it is fetched by a reader's browser."""

import inspect
import re
import shutil
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

import selfnorm
from selfnorm.cli.app import app as commands


def names_of(module: str) -> list[str]:
    """What a module's page lists: its own public names, less constants and those at the top."""
    found = import_module(module)
    names = getattr(found, "__all__", None) or [
        name for name, each in vars(found).items() if getattr(each, "__module__", None) == module
    ]
    return [
        name
        for name in names
        # what another room lends is on that room's page
        if getattr(getattr(found, name), "__module__", module).startswith(module)
        and (callable(getattr(found, name)) or inspect.ismodule(getattr(found, name)))
        and getattr(selfnorm, name, None) is not getattr(found, name)
        and not name.startswith("_")
    ]


project = "selfnorm"
author = "The selfnorm developers"
copyright = f"{author}; MIT licence"
release = version = selfnorm.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
smartquotes_action = "qe"  # the dashes of --options stay two
templates_path = ["_templates"]

# Pages
myst_enable_extensions = ["colon_fence", "dollarmath", "amsmath"]
myst_heading_anchors = 4
suppress_warnings = [
    "config.cache",  # a function among the settings
    "ref.python",  # attributes of one name in several classes
]

# Notebooks: Markdown files with code cells, run once and kept until a cell changes.
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parent.parent / "out" / "notebooks")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars and warnings of other libraries

# Reference: one page for each public name, from its docstring.
autosummary_generate = True
autosummary_context = {"names_of": names_of}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures of tensors and arrays say little that the text does not
napoleon_use_rtype = False
napoleon_preprocess_types = False

# Theme
html_theme = "pydata_sphinx_theme"
html_title = "selfnorm"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}
html_css_files = ["selfnorm.css"]
html_js_files = ["selfnorm.js"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"index": []}
html_theme_options: dict[str, Any] = {
    "logo": {"text": "selfnorm"},
    "navbar_end": ["theme-switcher"],
    "collapse_navigation": True,
    "show_prev_next": True,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}

# Formulas without a network: MathJax is one file of the site, loaded by pages that need it.
mathjax_path = "mathjax/tex-svg.js"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def copy_mathjax(app: Any, error: Exception | None) -> None:
    """Put MathJax beside the other static files."""
    if error is None:
        source = files("sphinx-mathjax-offline") / "static" / "mathjax" / "tex-svg.js"
        target = Path(app.outdir) / "_static" / mathjax_path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(source), target)


def write_commands(app: Any) -> None:
    """The page of the command line, from what each command says of itself."""
    command = typer.main.get_command(commands)
    context = typer.Context(command, info_name="selfnorm")
    page = get_docs_for_click(obj=command, ctx=context, name="selfnorm", title="Command line")
    page = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+", "", page)  # cut-off lines; all follow in full
    folder = Path(app.srcdir) / "reference" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "command-line.md").write_text(page, encoding="utf-8")


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("builder-inited", write_commands)
    app.connect("build-finished", copy_mathjax)
