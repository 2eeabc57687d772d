// node bundle.mjs OUT_FOLDER: widgets.js and widgets.css, in a folder that has this one's packages installed.
import { build } from 'esbuild';

await build({
  entryPoints: ['widgets.js'],
  outdir: process.argv[2],
  bundle: true,
  minify: true,
  format: 'iife',
  target: 'es2020',
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
  legalComments: 'linked', // the licenses lie beside, in *.LEGAL.txt
  logLevel: 'warning',
});
