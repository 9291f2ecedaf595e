"""One lane's step: its layout, where its attention is computed, and how lanes take turns."""
