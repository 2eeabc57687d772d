// Draws the widgets of a page that has no kernel behind it, from the state that MyST-NB stored in the page.
//
// The models and views are ipywidgets' own. Their usual bundle (html-manager's embed.js) adds the widgets of ipywidgets 7
// and the whole of JupyterLab's output rendering, which no page of this book uses; without them a page is a third lighter.
import * as base from '@jupyter-widgets/base';
import { ManagerBase } from '@jupyter-widgets/base-manager';
import * as controls from '@jupyter-widgets/controls';
import { MessageLoop } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';
import '@jupyter-widgets/controls/css/labvariables.css';
import '@jupyter-widgets/controls/css/widgets-base.css';
import '@lumino/widgets/style/index.css';

const MODULES = { '@jupyter-widgets/base': base, '@jupyter-widgets/controls': controls };
const NOTHING = { on_close() {}, on_msg() {}, close() {}, send() {} };

class PageManager extends ManagerBase {
  async loadClass(name, module) {
    const found = MODULES[module]?.[name];
    if (!found) throw new Error(`this page can't draw ${name} of ${module}`);
    return found;
  }

  async _get_comm_info() {
    return {};
  }

  async _create_comm() {
    return NOTHING; // there is no kernel to talk to
  }
}

const of = (type) => document.querySelectorAll(`script[type="application/vnd.jupyter.widget-${type}+json"]`);

async function draw() {
  for (const state of of('state')) {
    const manager = new PageManager();
    const models = new Map((await manager.set_state(JSON.parse(state.textContent))).map((model) => [model.model_id, model]));
    for (const place of of('view')) {
      const model = models.get(JSON.parse(place.textContent).model_id);
      if (!model) continue;
      const area = document.createElement('div');
      area.className = 'widget-subarea';
      place.before(area);
      const view = await manager.create_view(model);
      Widget.attach(view.luminoWidget, area);
      window.addEventListener('resize', () =>
        MessageLoop.postMessage(view.luminoWidget, Widget.ResizeMessage.UnknownSize)
      );
    }
  }
}

if (document.readyState === 'complete') draw();
else window.addEventListener('load', draw);
